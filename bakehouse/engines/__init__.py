"""What each engine asks of Bakehouse: definitions, arguments, endpoints, acceptance."""
