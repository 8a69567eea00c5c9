"""Machines that ranks compute with: known servers, devices and models, with where each figure is from."""
