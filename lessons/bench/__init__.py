"""What bench.py measures with, and lessons, too: timing in turns and tables, rates, peers, strategies."""
