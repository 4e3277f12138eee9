"""The fastcross command: parses, prints, and calls the rest."""
