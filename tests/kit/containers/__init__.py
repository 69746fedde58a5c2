"""Runs what images, the compose file and the Kubernetes manifests say as processes of this machine."""
