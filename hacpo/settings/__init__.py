"""What params.yaml may say, read and checked."""
