"""A SageMaker runtime client, as boto3 makes it, of a running stack."""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config

from tests.kit.stack import Stack


def runtime_client(stack: Stack) -> Any:
    """Return a client that sends each call once, and signs it with keys that nobody checks."""
    return boto3.client(
        "sagemaker-runtime",
        endpoint_url=stack.url,
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="y",
        config=Config(retries={"total_max_attempts": 1}, proxies={}),
    )
