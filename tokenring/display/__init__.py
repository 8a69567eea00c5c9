"""Output for people: the console, safe text, SVG."""
