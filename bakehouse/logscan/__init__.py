"""What log lines mean: rows of data, one scanner for finished logs and for a live tail.

`scan(lines)` judges a finished log, `Scanner` follows a growing one; both are the same code.
"""
