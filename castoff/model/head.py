"""The two ends of the model that work over the vocabulary: embedding and lm_head, replicated or split.

Axes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from castoff.model.setup import Setup
from castoff.model.sharding import gather_tokens, join_tokens, peers, piece_index, reduce_tokens
from castoff.ops.collectives import all_gather, all_to_all
from castoff.ops.linear import Weight, linear
from castoff.ops.program import Tensor
from castoff.ops.tokens import embedding, sample


def embed(setup: Setup, table: Weight, ids_T: Tensor) -> Tensor:
    """Embeddings of this rank's tokens, whole (T, D)."""
    own, tp = setup.mesh.embed_tp, setup.mesh.tp
    tokens, hidden = ids_T.shape[0], setup.model.hidden_size
    if own.size == 1:
        return embedding(ids_T, table)
    ids = gather_tokens(ids_T, own, tp)
    if setup.mesh.parallel.word_embedding_tp == "row":
        partial = embedding(ids, table, first=piece_index(own, tp) * table.values.shape[0])
        return reduce_tokens(partial, own, tp, tokens, split=False)
    # Every rank has a slice of D for the tokens of the whole group; each TP rank takes its tokens, then joins slices.
    mine = all_to_all(embedding(ids, table), peers(own, tp), shape=(tokens, hidden // tp.size))
    return all_gather(mine, tp, axis=1)


def logits_and_sample(setup: Setup, lm_head: Weight, hidden_TD: Tensor) -> tuple[Tensor | None, Tensor]:
    """Logits (T, V) and most likely next tokens (T,) of the rows given.

    The logits are None where each of several groups of a TP group has a share of the tokens: none has them all.
    """
    own, tp = setup.mesh.lmhead_tp, setup.mesh.tp
    tokens, vocabulary = hidden_TD.shape[0], setup.model.vocab_size
    logits_TV = linear(gather_tokens(hidden_TD, own, tp), lm_head)
    if own.size > tp.size:
        logits_TV = all_to_all(logits_TV, peers(own, tp), shape=(tokens, vocabulary // tp.size))
        logits_TV = all_gather(logits_TV, tp, axis=1)
        return logits_TV, sample(logits_TV)
    logits_TV = all_gather(logits_TV, own, axis=1)
    ids_T = sample(logits_TV)
    return (logits_TV, ids_T) if own.size == tp.size else (None, join_tokens(ids_T, peers(own, tp), tokens))
