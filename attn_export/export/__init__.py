"""Subject → canonical graph, with the capture proven and refusals explained."""
