"""Everything specific to one engine, behind one interface."""
