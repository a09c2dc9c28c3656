"""proxpo inside the engines people already run; each adapter imports its host only when used."""
