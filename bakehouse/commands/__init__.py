"""One module a task: take parsed options, call the rooms, give an `Outcome`. None prints."""
