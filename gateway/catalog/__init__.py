"""The models, versions and workers that exist, and small settings documents that gateways share."""
