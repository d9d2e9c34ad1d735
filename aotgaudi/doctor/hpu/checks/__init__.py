"""What is examined, and what each outcome means. Imports neither torch nor habana_frameworks."""
