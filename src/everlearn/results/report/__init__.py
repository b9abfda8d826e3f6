"""Views of results: text tables, plots, spreadsheets, an HTML report and its local server."""
