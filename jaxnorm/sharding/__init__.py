"""How arrays are divided among devices, and what these compute of a row that is."""
