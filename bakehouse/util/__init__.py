"""Small tools that know nothing of servers."""
