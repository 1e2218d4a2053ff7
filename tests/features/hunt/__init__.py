"""Tests of the hunt."""
