"""Files that jobs leave behind."""
