//! What the tests with a service named "s" in a folder of their own share.

use std::path::Path;

use tombolo_rpc::client::{Client, ConnectOptions};
use tombolo_rpc::provider::Options;

pub(crate) fn options(dir: &Path) -> Options {
    Options { folder: Some(dir.into()), ..Options::default() }
}

pub(crate) fn connect_options(dir: &Path) -> ConnectOptions {
    ConnectOptions { folder: Some(dir.into()), ..ConnectOptions::default() }
}

pub(crate) fn connect(dir: &Path) -> Client {
    Client::connect_with("s", &connect_options(dir)).unwrap()
}
