"""What log lines mean: rows of data, one scanner for finished logs and for a live tail.

`scan(lines)` judges a finished log, `Scanner` follows a growing one; both are the same code.
"""

from bakehouse.signatures.model import ENGINES, STAGES, Finding, Severity, exit_code
from bakehouse.signatures.scanner import Scanner, scan

__all__ = ["ENGINES", "STAGES", "Finding", "Scanner", "Severity", "exit_code", "scan"]
