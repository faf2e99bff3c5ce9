//! The registry: registration, duplicates, unknown names and keys, panics.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use zf_core::registry::{Build, BuildContext, Description, Place, Registry, Slot, setting};
use zf_core::slots;
use zf_core::stage::Schedule;
use zf_core::{Error, register};

/// Multiplies by a fixed factor.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Flat {
    /// The factor.
    ratio: f64,
    /// How it is applied.
    #[serde(default)]
    shape: Shape,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Shape {
    #[default]
    Round,
    Square,
}

impl Schedule for Flat {
    fn factor(&self, _step: u64, _total: u64) -> f64 {
        self.ratio
    }
}

impl Build<slots::Schedule> for Flat {
    fn build(self, _cx: &BuildContext) -> anyhow::Result<Arc<dyn Schedule>> {
        match self.ratio {
            r if r < 0.0 => Err(setting("ratio", format!("must be at least 0, found {r}"))),
            r if r > 9.0 => panic!("ratio {r} is out of this world"),
            r if r > 5.0 => anyhow::bail!("a ratio of {r} with {:?} is too much", self.shape),
            _ => Ok(Arc::new(self)),
        }
    }
}

register!(slots::Schedule, "test-flat", Flat, "multiplies by a fixed factor", "ratio = 0.5");

/// A settings type that forgets to refuse unknown keys.
#[derive(Debug, Deserialize, JsonSchema)]
struct Lax {
    /// A number.
    #[serde(default)]
    number: f64,
}

impl Build<slots::Schedule> for Lax {
    fn build(self, _cx: &BuildContext) -> anyhow::Result<Arc<dyn Schedule>> {
        Ok(Arc::new(Flat { ratio: self.number, shape: Shape::Square }))
    }
}

register!(slots::Schedule, "test-lax", Lax, "forgets", "number = 1.0");

fn build(text: &str) -> zf_core::Result<Arc<dyn Schedule>> {
    let table: toml::Table = text.parse().expect("the test's own TOML");
    Registry::global()?.build::<slots::Schedule>(&table, &BuildContext::default())
}

#[track_caller]
fn check(text: &str, expected: &str) {
    let error = build(text).err().expect("must be refused");
    assert_eq!(error.to_string(), expected);
    assert_eq!(error.exit_code(), 2);
}

#[test]
fn a_registered_stage_is_built_from_its_table() {
    let schedule = build("kind = 'test-flat'\nratio = 0.25").expect("valid");
    assert_eq!(schedule.factor(3, 10), 0.25);
}

#[test]
fn a_description_says_where_it_comes_from() {
    let registry = Registry::global().expect("no duplicates");
    let entry = registry.get("schedule", "test-flat").expect("registered");
    assert_eq!(entry.help, "multiplies by a fixed factor");
    assert_eq!(entry.krate, "zf-core");
    assert!(entry.place.file.ends_with("registry.rs"), "{}", entry.place);
    let schema = entry.schema();
    let ratio = schema.pointer("/properties/ratio/description");
    assert_eq!(ratio, Some(&"The factor.".into()));
}

#[test]
fn entries_are_sorted() {
    let registry = Registry::global().expect("no duplicates");
    assert_eq!(registry.names("schedule"), ["test-flat", "test-lax"]);
    assert_eq!(registry.names("partition"), [""; 0]);
}

#[test]
fn unknown_names_are_answered_with_the_list_and_the_nearest() {
    check(
        "kind = 'test-flit'",
        "unknown schedule stage `test-flit`: did you mean `test-flat`? registered are: test-flat, test-lax; \
         is the crate that defines it linked?",
    );
    check(
        "kind = 'cosine'",
        "unknown schedule stage `cosine`: registered are: test-flat, test-lax; is the crate that defines it linked?",
    );
    check("kind = 3", "`kind` in [schedule]: expected the name of a stage, found integer `3`");
}

#[test]
fn unknown_slots_are_answered_with_the_list_and_the_nearest() {
    let error = Registry::global().expect("no duplicates").get("schedul", "test-flat").expect_err("no such slot");
    assert_eq!(
        error.to_string(),
        "unknown slot `schedul`, did you mean `schedule`? slots are: data, device.link, model, offload, optim, partition, preset, \
         schedule, select, select.score, select.wrap, transport, transport.wrap",
    );
}

#[test]
fn wrong_settings_name_the_key() {
    check(
        "kind = 'test-flat'\nratoi = 1.0",
        "unknown key `ratoi` in [schedule] test-flat; did you mean `ratio`? expected one of: ratio, shape",
    );
    check("kind = 'test-flat'", "missing key `ratio` in [schedule] test-flat");
    check("kind = 'test-flat'\nratio = 'x'", "`ratio` in [schedule] test-flat: expected a number, found string \"x\"");
    check(
        "kind = 'test-flat'\nratio = 1\nshape = 'sqare'",
        "unknown value `sqare` for `shape` in [schedule] test-flat; did you mean `square`? expected one of: round, square",
    );
    check("kind = 'test-flat'\nratio = -1", "`ratio` in [schedule] test-flat: must be at least 0, found -1");
    check("kind = 'test-flat'\nratio = 6", "[schedule] test-flat: a ratio of 6 with Round is too much");
}

#[test]
fn settings_without_effect_are_refused_even_when_the_type_forgets_to() {
    check(
        "kind = 'test-lax'\nnumbr = 1.0",
        "unknown key `numbr` in [schedule] test-lax; did you mean `number`? expected one of: number",
    );
    // Schedules have no decorators.
    check("kind = 'test-lax'\nwrap = []", "unknown key `wrap` in [schedule] test-lax; expected one of: number");
}

#[test]
fn a_panic_in_build_becomes_an_error_with_the_stage_name() {
    let error = build("kind = 'test-flat'\nratio = 10").err().expect("panics");
    assert!(matches!(error, Error::Stage { .. }));
    assert_eq!(
        error.to_string(),
        "schedule stage `test-flat`: panicked while it was built: ratio 10 is out of this world"
    );
}

#[test]
fn duplicates_are_refused_naming_both_places() {
    let entry =
        |file, line, krate| Description::new::<slots::Schedule, Flat>("twin", "help", "", krate, Place { file, line });
    let twice = [entry("b/src/lib.rs", 7, "b"), entry("a/src/lib.rs", 30, "a")];
    let error = Registry::of(twice).expect_err("registered twice");
    assert_eq!(
        error.to_string(),
        "schedule stage `twin` is registered twice, at a/src/lib.rs:30 (crate a) and at b/src/lib.rs:7 (crate b); \
         rename one of them"
    );
}

#[test]
fn one_name_in_two_slots_is_no_duplicate() {
    let place = Place { file: "x.rs", line: 1 };
    let entries = [
        Description::new::<slots::Schedule, Flat>("twin", "", "", "x", place),
        Description::preset("twin", "", "", "x", place),
    ];
    let registry = Registry::of(entries).expect("different slots");
    assert_eq!(registry.entries()[0].slot.name, slots::Preset::NAME);
}
