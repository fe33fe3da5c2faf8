"""Everything that made `luce-tiny`, the small trained qwen4exp model shipped with pyluce."""
