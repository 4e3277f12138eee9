"""Other packages' models on fastcross's operators, and export to files that run without fastcross."""
