//! Wrappers that a run file lists.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use zf_comm::{BlockingConfig, DelayedConfig, FailingConfig, How, ModelledConfig, ReorderingConfig, wrap};
use zf_core::Result;
use zf_core::config::Run;
use zf_core::registry::{Build, BuildContext, Registry, Wrap};
use zf_core::slots;
use zf_core::stage::Fabric;

use crate::common::run;

static CONNECTED: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Notes its name when a rank connects.
#[derive(serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct Noting {
    name: String,
}

impl Build<slots::TransportWrap> for Noting {
    fn build(self, _: &BuildContext) -> anyhow::Result<Wrap<slots::Transport>> {
        anyhow::ensure!(!self.name.is_empty(), "who?");
        let with = move |_, inner| {
            CONNECTED.lock().push(self.name.clone());
            inner
        };
        Ok(Box::new(|fabric| Ok(wrap(fabric, with))))
    }
}

zf_core::register!(slots::TransportWrap, "test-noting", Noting, "notes its name", "");

fn build(text: &str) -> Result<Arc<dyn Fabric>> {
    let table: toml::Table = text.parse().expect("the test's own TOML");
    Registry::global()?.build::<slots::Transport>(&table, &BuildContext::default())
}

#[test]
fn the_first_of_the_list_is_the_innermost() {
    let fabric = build("wrap = [{ kind = 'test-noting', name = 'a' }, { kind = 'test-noting', name = 'b' }]");
    fabric.expect("valid").connect(0).expect("free");
    assert_eq!(*CONNECTED.lock(), ["a", "b"]);
}

#[test]
fn ranks_of_a_node_pass_through_and_can_be_modelled() {
    let text = "ranks = 8\nranks_per_node = 4\nwrap = [{ kind = 'blocking' }, { kind = 'delayed', latency = '1ms' }";
    assert_eq!(build(&format!("{text}]")).expect("valid").ranks_per_node(), 4);
    let tier = "{ bandwidth = '1GB/s', latency = '1us' }";
    let model = format!("{text}, {{ kind = 'modelled', intra = {tier}, inter = {tier}, ranks_per_node = 2 }}]");
    assert_eq!(build(&model).expect("valid").ranks_per_node(), 2);
}

#[test]
fn a_listed_failure_names_its_rank() {
    let fabric =
        build("ranks = 2\nwrap = [{ kind = 'failing', rank = 1, issue = 1, message = 'cut' }]").expect("valid");
    let errors = run(&fabric, |_, mut transport| {
        transport.exchange("before", vec![1]).expect("both take part");
        let error = transport.exchange("then", vec![2]).err().map(|error| error.to_string());
        transport.abort(error.as_deref().unwrap_or_default());
        error
    });
    assert_eq!(errors[1].as_deref(), Some("cut"));
    assert!(errors[0].as_deref().is_some_and(|error| error.contains("cut")), "{errors:?}");
}

#[test]
fn wrong_lists_are_refused() {
    let tier = "{ bandwidth = '1GB/s', latency = '1us' }";
    for (list, expected) in [
        (
            "3",
            "`wrap` in [transport] threads: expected a list such as [{ kind = \"...\" }], from the inside out, found integer",
        ),
        ("['delayed']", "`wrap[0]` in [transport] threads: expected a table with the key `kind`"),
        ("[{ latency = '1ms' }]", "missing key `wrap[0].kind` in [transport] threads"),
        (
            "[{ kind = 'delyed' }]",
            "unknown value `delyed` for `wrap[0].kind` in [transport] threads; did you mean `delayed`?",
        ),
        ("[{ kind = 'delayed' }]", "missing key `wrap[0].latency`"),
        (
            "[{ kind = 'blocking' }, { kind = 'delayed', latency = 'soon' }]",
            "`wrap[1].latency` in [transport] threads: expected a duration",
        ),
        ("[{ kind = 'delayed', latency = '1ms', window = 2 }]", "unknown key `wrap[0].window`"),
        ("[{ kind = 'test-noting', name = '' }]", "[transport] threads: wrap[0] test-noting: who?"),
        ("[{ kind = 'failing', rank = 0 }]", "`wrap[0].issue` in [transport] threads: expected the number of a call"),
        ("[{ kind = 'failing', issue = 1, wait = 1 }]", "`wrap[0].wait` in [transport] threads: a rank fails once"),
        (
            "[{ kind = 'failing', rank = 4, issue = 1 }]",
            "`wrap[0].rank` in [transport] threads: expected a rank below 4, found 4",
        ),
        (
            &format!("[{{ kind = 'modelled', intra = {tier}, inter = {tier}, ranks_per_node = 3 }}]"),
            "`wrap[0].ranks_per_node` in [transport] threads: expected a number that divides the 4 ranks, found 3",
        ),
        (
            &format!("[{{ kind = 'modelled', intra = {tier}, inter = {{ bandwidth = 'fast', latency = '1us' }} }}]"),
            "expected a bandwidth",
        ),
    ] {
        let error = build(&format!("ranks = 4\nwrap = {list}")).err().unwrap_or_else(|| panic!("{list} was accepted"));
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(expected), "{list}: {error}");
    }
}

#[test]
fn a_run_file_points_at_the_mistake_and_keeps_the_list() {
    let file = |latency: &str| {
        format!(
            "[run]\nsteps = 1\n[transport]\nranks = 1\nwrap = [\n  {{ kind = 'delayed', latency = {latency} }},\n]\n"
        )
    };
    let error = Run::from_toml_str(&file("7"), "run.toml").expect_err("a number").to_string();
    assert!(error.starts_with("run.toml:6:33"), "{error}");
    let run = Run::from_toml_str(&file("'1ms'"), "run.toml").expect("valid");
    let again = Run::from_toml_str(&run.resolved_toml(), "again").expect("the resolved run reads back");
    let table = |run: &Run| run.resolved().into_iter().find(|(name, _)| name == "transport").expect("a section").1;
    assert_eq!(table(&again), table(&run));
    assert_eq!(table(&run)["timeout"].as_str(), Some("1m"), "defaults are filled in beside the list");
    assert_eq!(table(&run)["wrap"][0]["latency"].as_str(), Some("1ms"));
    let fabric = run.build::<slots::Transport>(Registry::global().expect("no duplicates"), &run.context());
    assert_eq!(fabric.expect("valid").world(), 1);
    // A slot of decorators is no section.
    let error = Run::from_toml_str("[run]\nsteps = 1\n['transport.wrap']\nkind = 'blocking'", "run.toml");
    assert!(error.expect_err("no section").to_string().contains("unknown section [transport.wrap]"));
}

#[test]
fn settings_survive_a_round_trip() {
    fn check<T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug>(config: T) {
        let text = toml::to_string(&config).expect("plain settings");
        assert_eq!(toml::from_str::<T>(&text).expect("just written"), config, "{text}");
    }
    check(BlockingConfig {});
    check(DelayedConfig { latency: Duration::from_micros(1500) });
    check(ReorderingConfig { seed: 9, window: Duration::from_micros(300) });
    check(FailingConfig { rank: 1, issue: None, wait: Some(3), how: How::Stop, message: "gone".into() });
    let tier = |bandwidth: &str| zf_comm::Tier {
        bandwidth: bandwidth.parse().expect("valid"),
        latency: Duration::from_micros(5),
    };
    check(ModelledConfig { intra: tier("50GB/s"), inter: tier("0.5GiB/s"), ranks_per_node: Some(8) });
}
