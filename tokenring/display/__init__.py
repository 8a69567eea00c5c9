"""What people see: the console, safe text, SVG."""
