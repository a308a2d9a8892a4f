"""This room brings weights to workers: blobs named by their content, signed manifests, who writes and who fetches them."""
