//! Serves folders as repositories of a Hub, until its standard input ends:
//!
//!     cargo run -p lockstep-testkit --example hub_stand_in -- models/org/name=FOLDER datasets/org/name=FOLDER
//!
//! Prints the value for `HF_ENDPOINT`. `tools/check_hub_cache.py` uses it.

#![allow(clippy::print_stdout)]

use std::io::Read as _;
use std::path::Path;

use lockstep_testkit::HubStandIn;

fn main() {
    // Large files come from another address, as they do from the Hub.
    let (hub, storage) = (HubStandIn::start(), HubStandIn::start());
    for arg in std::env::args().skip(1) {
        let (name, folder) = arg.split_once('=').expect("models/NAME=FOLDER or datasets/NAME=FOLDER");
        match (name.strip_prefix("models/"), name.strip_prefix("datasets/")) {
            (Some(name), _) => hub.add_model_folder(name, Path::new(folder)),
            (_, Some(name)) => hub.add_dataset_folder(name, Path::new(folder)),
            _ => panic!("{name} begins with neither models/ nor datasets/"),
        };
    }
    hub.store_on(&storage);
    println!("{}", hub.endpoint());
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}
