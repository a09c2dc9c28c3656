"""Renders inspections and runs as tables, figures and HTML."""
