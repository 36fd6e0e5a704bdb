"""Plans: from recipe, lock and host facts to steps. Pure: nothing here runs or reads anything."""
