"""A spec, a manifest or a bundle at a glance: computed once as a frozen value, which the page and ``--json`` both show."""
