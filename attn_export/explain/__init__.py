"""Why a number differs: counter-experiments, the first wrong node, known mistakes tried out."""
