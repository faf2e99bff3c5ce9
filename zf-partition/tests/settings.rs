//! How a run file's `[partition]` is read.

use zf_core::registry::{BuildContext, Registry};
use zf_core::slots;
use zf_partition::{ByteSize, ReshardAfterForward, Scope, ZeroConfig};

fn check(text: &str, expected: &ZeroConfig) {
    let found: ZeroConfig = toml::from_str(text).unwrap();
    assert_eq!(&found, expected, "{text}");
    // What is written to the run folder reads back.
    assert_eq!(&toml::from_str::<ZeroConfig>(&toml::to_string(&found).unwrap()).unwrap(), expected);
}

#[test]
fn settings() {
    check("", &ZeroConfig::default());
    check("stage = 3", &ZeroConfig::stage(3));
    check("stage = 0\nbucket = 1024", &ZeroConfig { bucket: ByteSize(1024), ..ZeroConfig::stage(0) });
    let text = "stage = 3\nprefetch = 0\npersist_below = 1000\nmax_live_units = 4\nreshard_after_forward = ";
    for (value, reshard) in [
        ("true", ReshardAfterForward::Free),
        ("false", ReshardAfterForward::Keep),
        ("4", ReshardAfterForward::Ranks(4)),
        ("\"node\"", ReshardAfterForward::Node),
    ] {
        let expected = ZeroConfig {
            prefetch: 0,
            persist_below: 1000,
            max_live_units: 4,
            reshard_after_forward: reshard,
            ..ZeroConfig::stage(3)
        };
        check(&format!("{text}{value}"), &expected);
    }
    let found: ZeroConfig =
        toml::from_str("scope = { p = 1, g = \"node\", o = \"world\" }\nbucket = \"1MiB\"").unwrap();
    let scope = found.scope.unwrap();
    assert_eq!((scope.p, scope.g, scope.o), (Scope::Ranks(1), Scope::Node, Scope::World));
    assert_eq!(found.bucket, ByteSize(1 << 20));
}

#[test]
fn byte_sizes() {
    for (text, bytes) in [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("25MB", 25_000_000),
        (" 24 mib ", 24 << 20),
        ("1.5GB", 1_500_000_000),
        ("0.5 GiB", 1 << 29),
    ] {
        let size: ByteSize = text.parse().unwrap();
        assert_eq!(size, ByteSize(bytes), "{text}");
        assert_eq!(size.to_string().parse(), Ok(size), "{size}");
    }
    for text in
        ["", "MB", "-1MB", "1TB", "1e3", "infB", "nan", "25 M B", "20000000000GB", "1.5.2KB", "18446744073709551616"]
    {
        let message = text.parse::<ByteSize>().unwrap_err().to_string();
        assert!(message.ends_with(&format!("found {text:?}")), "{message}");
    }
}

#[test]
fn wrong_settings_are_named() {
    let registry = Registry::global().unwrap();
    for (text, expected) in [
        ("stage = 4", "must be 0, 1, 2 or 3, found 4"),
        ("stage = -1", "stage"),
        ("stage = 1\nscope = { p = 1, g = 1, o = 1 }", "give one of them"),
        ("scope = { p = 1, g = 1 }", "missing key `scope.o`"),
        ("scope = { p = 0, g = 1, o = 1 }", "a number of ranks from 1 on"),
        ("scope = { p = 1, g = 1, o = \"all\" }", "\"world\" or \"node\""),
        ("bucket = 0", "must be at least 1 byte"),
        ("bucket = \"25\u{b5}B\"", "expected a size such as"),
        ("bucket = -5", "a number of bytes or a size"),
        ("prefetch = -1", "prefetch"),
        ("prefetched = 1", "did you mean `prefetch`"),
        ("max_live_units = 0", "must be at least 1, the unit that computes, found 0"),
        ("persist_below = \"all\"", "persist_below"),
        ("reshard_after_forward = 0", "true, false, a number of ranks from 1 on, or \"node\""),
        ("reshard_after_forward = \"world\"", "or \"node\""),
    ] {
        let table: toml::Table = format!("kind = \"zero\"\n{text}").parse().unwrap();
        let Err(error) = registry.build::<slots::Partition>(&table, &BuildContext::default()) else {
            panic!("{text} was accepted");
        };
        assert!(error.to_string().contains(expected), "{text}: {error}");
    }
    let example = registry.get("partition", "zero").unwrap().example;
    let table: toml::Table = format!("kind = \"zero\"\n{example}").parse().unwrap();
    registry.build::<slots::Partition>(&table, &BuildContext::default()).unwrap();
}
