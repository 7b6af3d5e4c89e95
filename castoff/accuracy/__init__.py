"""How far predictions are from measurements: tables of measured ops, priced row by row."""
