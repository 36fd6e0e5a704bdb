"""Side effects, each behind a small protocol: processes, git, HTTP, the clock.

Planning and judging take these as arguments and are tested without them; each adapter is tested
against the real thing.
"""
