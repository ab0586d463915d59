"""Plans: which objects a service or policy should have. Pure functions of spec and observation."""
