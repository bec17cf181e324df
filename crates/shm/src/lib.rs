//! Linux below the rings: sealed memory regions, mappings, doorbells, descriptor passing.
