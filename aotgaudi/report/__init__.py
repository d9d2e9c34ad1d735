"""Reports on a spec, a manifest or a bundle. A report is computed once as a frozen value, for the page and ``--json``."""
