"""What Ray hosts: replicas, API servers, the directory, the ingress; and `rayllm launch`, which starts them."""
