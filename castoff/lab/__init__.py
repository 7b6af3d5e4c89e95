"""What caches would have done with recorded selections."""
