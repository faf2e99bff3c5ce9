use super::*;

fn all() -> Vec<(&'static str, Arc<dyn Schedule>)> {
    let mut all: Vec<(&'static str, Arc<dyn Schedule>)> = Vec::new();
    for warmup in [0, 1, 5, 10, 11, 1000, u64::MAX] {
        all.push(("constant", Arc::new(ConstantConfig { warmup }.schedule().unwrap())));
        for min_ratio in [0.0, 0.1, 1.0] {
            all.push(("linear", Arc::new(LinearConfig { warmup, min_ratio }.schedule().unwrap())));
            all.push(("cosine", Arc::new(CosineConfig { warmup, min_ratio }.schedule().unwrap())));
            for shape in [DecayShape::Linear, DecayShape::Cosine, DecayShape::Sqrt] {
                for decay in [
                    Decay::Updates(0),
                    Decay::Updates(3),
                    Decay::Updates(u64::MAX),
                    Decay::Fraction(0.0),
                    Decay::Fraction(0.25),
                    Decay::Fraction(1.0),
                ] {
                    let config = WsdConfig { warmup, decay, min_ratio, shape };
                    all.push(("wsd", Arc::new(config.schedule().unwrap())));
                }
            }
        }
    }
    all
}

#[test]
fn always_a_number_from_0_to_1() {
    for (name, schedule) in all() {
        for total in [0, 1, 2, 10, 11, 1000, u64::MAX] {
            for step in [0, 1, 2, 4, 5, 9, 10, 11, 999, 1000, 5000, u64::MAX] {
                let factor = schedule.factor(step, total);
                assert!((0.0..=1.0).contains(&factor), "{name} {step}/{total}: {factor}");
            }
        }
    }
}

/// Compares a whole run and some steps after it.
fn check(schedule: &dyn Schedule, total: u64, expected: &[f64]) {
    let found: Vec<f64> = (0..expected.len() as u64).map(|t| schedule.factor(t, total)).collect();
    for (t, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() < 1e-12, "step {t}: {found:?}, expected {expected:?}");
    }
}

#[test]
fn table() {
    let constant = |warmup| ConstantConfig { warmup }.schedule().unwrap();
    check(&constant(0), 3, &[1.0, 1.0, 1.0, 1.0]);
    check(&constant(4), 6, &[0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);

    let linear = |warmup, min_ratio| LinearConfig { warmup, min_ratio }.schedule().unwrap();
    check(&linear(0, 0.0), 4, &[1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    check(&linear(2, 0.5), 4, &[0.5, 1.0, 1.0, 0.75, 0.5, 0.5]);
    // Warm-up as long as the run, and longer.
    check(&linear(2, 0.5), 2, &[0.5, 1.0, 0.5]);
    check(&linear(4, 0.5), 2, &[0.25, 0.5, 0.75, 1.0, 0.5]);
    check(&linear(0, 0.5), 0, &[0.5, 0.5]);
    check(&linear(0, 0.5), 1, &[1.0, 0.5]);

    let cosine = |warmup, min_ratio| CosineConfig { warmup, min_ratio }.schedule().unwrap();
    check(&cosine(0, 0.0), 2, &[1.0, 0.5, 0.0, 0.0]);
    check(&cosine(1, 0.2), 3, &[1.0, 1.0, 0.6, 0.2]);

    let wsd = |decay, shape| WsdConfig { warmup: 2, decay, min_ratio: 0.0, shape }.schedule().unwrap();
    check(&wsd(Decay::Updates(4), DecayShape::Linear), 8, &[0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    check(
        &wsd(Decay::Fraction(0.5), DecayShape::Sqrt),
        8,
        &[0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0 - 0.5f64.sqrt(), 1.0 - 0.75f64.sqrt(), 0.0],
    );
    // A decay longer than what the warm-up leaves.
    check(&wsd(Decay::Updates(99), DecayShape::Cosine), 4, &[0.5, 1.0, 1.0, 0.5, 0.0]);
}

#[test]
fn cosine_of_the_reference_run() {
    // lr (t + 1)/5 for t < 5, then lr (0.1 + 0.45 (1 + cos(pi (t - 5)/25))), 30 steps.
    let schedule = CosineConfig { warmup: 5, min_ratio: 0.1 }.schedule().unwrap();
    for t in 0..30 {
        let expected = if t < 5 {
            (t + 1) as f64 / 5.0
        } else {
            0.1 + 0.45 * (1.0 + (std::f64::consts::PI * (t - 5) as f64 / 25.0).cos())
        };
        assert!((schedule.factor(t, 30) - expected).abs() < 1e-15, "{t}");
    }
}

#[test]
fn refuses_ratios_outside_0_to_1() {
    let message = CosineConfig { warmup: 0, min_ratio: 1.5 }.schedule().unwrap_err().to_string();
    assert_eq!(message, "`min_ratio`: must be from 0 to 1, found 1.5");
    let config = WsdConfig { decay: Decay::Fraction(20.0), ..WsdConfig::default() };
    let message = config.schedule().unwrap_err().to_string();
    assert!(message.contains("`decay`: must be a number of updates (an integer)"), "{message}");
    assert!(LinearConfig { warmup: 0, min_ratio: f64::NAN }.schedule().is_err());
}
