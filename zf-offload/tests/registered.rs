//! What a run file can name.

use std::path::Path;

use tch::Device;
use zf_core::registry::{BuildContext, Registry};
use zf_core::slots;
use zf_core::trace::Trace;
// Without a use of the crate nothing of it would be linked.
use zf_offload::link::EmulatedConfig;

#[test]
fn every_example_builds() {
    let registry = Registry::global().unwrap();
    assert_eq!(registry.names("device.link"), ["cuda", "direct", "emulated"]);
    for name in registry.names("device.link") {
        let table: toml::Table = registry.get("device.link", name).unwrap().example.parse().unwrap();
        let link = table["device"]["link"].as_table().unwrap();
        assert_eq!(link["kind"].as_str(), Some(name));
        registry.build::<slots::Link>(link, &BuildContext::new(Path::new("."))).unwrap();
    }
}

#[test]
fn settings_are_read_and_written() {
    let registry = Registry::global().unwrap();
    let cx = BuildContext::new(Path::new("."));
    let table = |text: &str| format!("kind = 'emulated'\n{text}").parse::<toml::Table>().unwrap();
    let links = registry.build::<slots::Link>(&table("bandwidth = '2GB/s'"), &cx).unwrap();
    let link = links.open(0, Device::Cpu, &[], &Trace::new(0, 0)).unwrap();
    assert_eq!(link.bandwidth(), Some(2e9));
    for (wrong, named) in
        [("", "bandwidth"), ("bandwidth = '2GB'", "2GB"), ("bandwidth = '2GB/s'\nlatenzy = 1", "latenzy")]
    {
        let error = registry.build::<slots::Link>(&table(wrong), &cx).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
    let config: EmulatedConfig = toml::from_str("bandwidth = '4GB/s'\nlatency = '15us'").unwrap();
    assert_eq!(toml::from_str::<EmulatedConfig>(&toml::to_string(&config).unwrap()).unwrap(), config);
}
