"""The control plane's requests and answers as types that its routes, its OpenAPI document and its clients share.

Times are Unix seconds, durations seconds, rates per second; a metric that is not known yet is null.
"""
