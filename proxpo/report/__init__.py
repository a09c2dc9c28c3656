"""What people look at: terminal tables and self-contained pages."""
