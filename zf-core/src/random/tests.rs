use super::*;

fn moments(values: &[f32]) -> (f64, f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let power = |k| values.iter().map(|&v| (f64::from(v) - mean).powi(k)).sum::<f64>() / n;
    let variance = power(2);
    (mean, variance.sqrt(), power(4) / (variance * variance))
}

#[test]
fn normal_values_have_the_moments_of_a_normal_distribution() {
    let mut values = vec![0.0; 400_000];
    normal_into(&mut values, Stream::named(1, "w"), 0, 0.5, 2.0);
    let (mean, std, kurtosis) = moments(&values);
    assert!((mean - 0.5).abs() < 0.015, "mean {mean}");
    assert!((std - 2.0).abs() < 0.01, "standard deviation {std}");
    assert!((kurtosis - 3.0).abs() < 0.05, "kurtosis {kurtosis}");
    // Share beyond two standard deviations: 4.55 %.
    let outside = values.iter().filter(|&&v| (v - 0.5).abs() > 4.0).count() as f64 / 400_000.0;
    assert!((outside - 0.0455).abs() < 0.002, "{outside} beyond two standard deviations");
    // Neighbours share a radius; they must still be uncorrelated.
    let pairs = values.windows(2).map(|w| f64::from(w[0] - 0.5) * f64::from(w[1] - 0.5)).sum::<f64>() / 4.0 / 400_000.0;
    assert!(pairs.abs() < 0.01, "correlation of neighbours {pairs}");
}

#[test]
fn uniform_values_fill_their_interval() {
    let mut values = vec![0.0; 200_000];
    uniform_into(&mut values, Stream::named(1, "u"), 0, -3.0, 3.0);
    let (mean, std, _) = moments(&values);
    assert!(values.iter().all(|v| (-3.0..3.0).contains(v)));
    assert!(mean.abs() < 0.02, "mean {mean}");
    assert!((std - 3f64.sqrt()).abs() < 0.01, "standard deviation {std}");
}

#[test]
fn a_value_depends_on_its_index_alone() {
    let stream = Stream::named(3, "model.layers.0.mlp.up_proj.weight");
    let mut whole = vec![0.0; 1000];
    normal_into(&mut whole, stream, 0, 0.0, 1.0);
    for (first, count) in [(0, 1), (1, 3), (63, 5), (64, 64), (130, 700), (999, 1)] {
        let mut part = vec![0.0; count];
        normal_into(&mut part, stream, first as u64, 0.0, 1.0);
        assert_eq!(part, whole[first..first + count], "from {first}");
    }
}

#[test]
fn initial_values_follow_seed_and_name() {
    let spec = ParamSpec::new("a.weight", &[3, 5], Init::Normal { std: 0.02 });
    let other = ParamSpec { name: "b.weight".into(), ..spec.clone() };
    let first = initial(&spec, 1).unwrap();
    assert_eq!(first.size(), [3, 5]);
    assert_eq!(first, RandomWeights { seed: 1 }.load(&spec).unwrap());
    assert_ne!(first, initial(&spec, 2).unwrap());
    assert_ne!(first, initial(&other, 1).unwrap());
    assert_eq!(initial(&ParamSpec::new("n", &[4], Init::Ones), 1).unwrap(), Tensor::from_slice(&[1f32; 4]));
    assert_eq!(initial(&ParamSpec::new("z", &[0, 4], Init::Normal { std: 1.0 }), 1).unwrap().numel(), 0);
    assert!(initial(&ParamSpec::new("x", &[-1], Init::Ones), 1).is_err());
}

#[test]
fn a_mask_does_not_depend_on_how_sequences_are_split() {
    let noise = Noise { seed: 5, step: 9 };
    let x = Tensor::ones([6, 7, 11], (Kind::Float, tch::Device::Cpu));
    let ids: Vec<u64> = vec![4, 0, 17, 3, 8, 100_000_000_000];
    let whole = dropout(&x, 0.3, noise, 2, 1, &ids).unwrap();
    for (first, count) in [(0, 2), (2, 1), (3, 3)] {
        let part =
            dropout(&x.narrow(0, first, count), 0.3, noise, 2, 1, &ids[first as usize..(first + count) as usize]);
        assert_eq!(part.unwrap(), whole.narrow(0, first, count));
    }
    let different = [
        dropout(&x, 0.3, Noise { step: 10, ..noise }, 2, 1, &ids),
        dropout(&x, 0.3, Noise { seed: 6, ..noise }, 2, 1, &ids),
        dropout(&x, 0.3, noise, 3, 1, &ids),
        dropout(&x, 0.3, noise, 2, 2, &ids),
    ];
    for other in different {
        assert_ne!(other.unwrap(), whole);
    }
}

#[test]
fn dropout_keeps_the_mean_and_its_share() {
    for kind in [Kind::Float, Kind::BFloat16] {
        let x = Tensor::ones([4, 50_000], (kind, tch::Device::Cpu));
        let y = dropout(&x, 0.1, Noise { seed: 1, step: 0 }, 0, 0, &[0, 1, 2, 3]).unwrap();
        assert_eq!(y.kind(), kind);
        let kept = f64::try_from(y.ne(0.0).to_kind(Kind::Float).mean(Kind::Double)).unwrap();
        assert!((kept - 0.9).abs() < 0.004, "{kept} of the elements kept");
        let mean = f64::try_from(y.mean(Kind::Double)).unwrap();
        assert!((mean - 1.0).abs() < 0.006, "mean {mean}");
    }
}

#[test]
fn dropout_refuses_what_it_cannot_mean() {
    let x = Tensor::ones([2, 3], (Kind::Float, tch::Device::Cpu));
    let noise = Noise { seed: 0, step: 0 };
    assert!(dropout(&x, 1.0, noise, 0, 0, &[0, 1]).unwrap_err().to_string().contains("[0, 1)"));
    assert!(dropout(&x, 0.5, noise, 0, 0, &[0]).unwrap_err().to_string().contains("1 sequences"));
    assert_eq!(dropout(&x, 0.0, noise, 0, 0, &[0]).unwrap(), x);
}
