"""Support: servers, models and references for the tests of several folders."""
