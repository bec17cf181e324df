//! The program `tombolo`.

fn main() {}
