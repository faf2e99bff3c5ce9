//! What a run file can name, and what it is told about settings that are wrong.

use zf_core::registry::{BuildContext, Registry};
use zf_core::slots;
use zf_optim as _;

fn table(text: &str) -> toml::Table {
    text.parse().unwrap()
}

#[test]
fn every_example_builds() {
    let registry = Registry::global().unwrap();
    let cx = BuildContext::default();
    for kind in ["adamw", "lamb", "lion", "muon", "sgd"] {
        let example = registry.get("optim", kind).unwrap().example;
        let stage = registry.build::<slots::Optim>(&table(&format!("kind = \"{kind}\"\n{example}")), &cx).unwrap();
        assert!(stage.base().lr > 0.0);
    }
    for kind in ["constant", "cosine", "linear", "wsd"] {
        let example = registry.get("schedule", kind).unwrap().example;
        let stage = registry.build::<slots::Schedule>(&table(&format!("kind = \"{kind}\"\n{example}")), &cx).unwrap();
        assert_eq!(stage.factor(19, 100), 1.0, "{kind} after a warm-up of 20");
    }
}

#[test]
fn integers_serve_as_numbers_and_choose_the_form_of_the_decay() {
    let registry = Registry::global().unwrap();
    let cx = BuildContext::default();
    let build = |text: &str| registry.build::<slots::Schedule>(&table(text), &cx).unwrap();
    let updates = build("kind = \"wsd\"\ndecay = 50\nmin_ratio = 0");
    let part = build("kind = \"wsd\"\ndecay = 0.5\nmin_ratio = 0");
    for t in 0..=100 {
        assert_eq!(updates.factor(t, 100), part.factor(t, 100));
    }
    let optim = registry.build::<slots::Optim>(&table("kind = \"sgd\"\nlr = 1\nmomentum = 0"), &cx).unwrap();
    assert_eq!(optim.base().lr, 1.0);
}

#[test]
fn wrong_settings_are_named() {
    let registry = Registry::global().unwrap();
    let cx = BuildContext::default();
    for (text, expected) in [
        ("kind = \"adamw\"\nbetas = [0.9, 1.5]", "betas"),
        ("kind = \"adamw\"\nbetas = [0.9]", "betas"),
        ("kind = \"adamw\"\nmomentum = 0.9", "momentum"),
        ("kind = \"sgd\"\nlr = \"fast\"", "lr"),
        ("kind = \"lion\"\nbetas = [1, 0.99]", "betas"),
        ("kind = \"lion\"\neps = 1e-8", "eps"),
        ("kind = \"lamb\"\neps = 0", "eps"),
        ("kind = \"muon\"\nscalar_lr = -1", "scalar_lr"),
        ("kind = \"muon\"\nscale = \"large\"", "scale"),
        ("kind = \"muon\"\nsteps = 5", "steps"),
    ] {
        let Err(error) = registry.build::<slots::Optim>(&table(text), &cx) else {
            panic!("{text} was accepted");
        };
        assert!(error.to_string().contains(expected), "{error}");
    }
}
