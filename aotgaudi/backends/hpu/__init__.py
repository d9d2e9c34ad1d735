"""Intel Gaudi. So far its target, with which manifests are planned; what compiles and what serves come with the backend."""
