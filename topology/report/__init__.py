"""Reports of a topology: as text, as a picture, as a page."""
