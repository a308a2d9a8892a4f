"""This room brings weights to workers: blobs named by their content, signed manifests, writing and fetching them."""
