//! Statistics of the runs of a table.

use serde_json::Value;

/// Some runs of a table.
#[derive(Clone, Debug)]
pub struct Runs<'a>(pub Vec<&'a Value>);

impl<'a> Runs<'a> {
    /// Returns the runs with this value of a field.
    pub fn only(&self, field: &str, value: impl Into<Value>) -> Self {
        let value = value.into();
        self.filter(|run| run[field] == value)
    }

    /// Returns the runs that fit.
    pub fn filter(&self, fits: impl Fn(&Value) -> bool) -> Self {
        Self(self.0.iter().copied().filter(|run| fits(run)).collect())
    }

    /// Returns the runs of each set of values of these fields, in the order of their first run.
    pub fn groups(&self, fields: &[impl AsRef<str>]) -> Vec<Self> {
        let key = |run: &'a Value| -> Vec<&Value> {
            fields.iter().map(|field| &run[field.as_ref()]).collect()
        };
        let mut groups: Vec<Self> = Vec::new();
        for run in &self.0 {
            match groups.iter_mut().find(|group| key(group.0[0]) == key(run)) {
                Some(group) => group.0.push(run),
                None => groups.push(Self(vec![run])),
            }
        }
        groups
    }

    /// Returns the first run's value of a field; null without runs.
    pub fn first(&self, field: &str) -> &'a Value {
        self.0.first().map_or(&Value::Null, |run| &run[field])
    }

    /// Returns true if a field is true in every run.
    pub fn all(&self, field: &str) -> bool {
        self.0.iter().all(|run| run[field] == true)
    }

    /// Returns true if a field is true in any run.
    pub fn any(&self, field: &str) -> bool {
        self.0.iter().any(|run| run[field] == true)
    }

    /// Returns the values of a figure, in the order of the runs. Runs without the field are left out. A null was not
    /// measured, and makes the figure of all of the runs unknown, which is an empty list.
    pub fn values(&self, figure: &str) -> Vec<f64> {
        let values = self.0.iter().filter_map(|run| run.get(figure));
        let values: Option<Vec<f64>> = values.map(Value::as_f64).collect();
        values.unwrap_or_default()
    }

    /// Returns the median of a figure.
    pub fn median(&self, figure: &str) -> Option<f64> {
        let values = self.values(figure);
        (!values.is_empty()).then(|| median(&values))
    }

    /// Returns the least value of a figure.
    pub fn least(&self, figure: &str) -> Option<f64> {
        self.values(figure).into_iter().min_by(f64::total_cmp)
    }

    /// Returns the greatest value of a figure.
    pub fn most(&self, figure: &str) -> Option<f64> {
        self.values(figure).into_iter().max_by(f64::total_cmp)
    }

    /// Returns the run with the median of a figure; of two, the smaller.
    pub fn middle(&self, figure: &str) -> Option<&'a Value> {
        let mut runs = self.0.clone();
        let value = |run: &Value| run[figure].as_f64().unwrap_or(f64::MAX);
        runs.sort_by(|one, two| value(one).total_cmp(&value(two)));
        runs.get(runs.len().saturating_sub(1) / 2).copied()
    }
}

/// Returns the median of the ratios of ours to theirs, round by round.
pub fn ratio(ours: &Runs<'_>, theirs: &Runs<'_>, figure: &str) -> Option<f64> {
    let (ours, theirs) = (ours.values(figure), theirs.values(figure));
    let ratios: Vec<f64> = ours
        .iter()
        .zip(theirs)
        .map(|(one, two)| one / two)
        .collect();
    (!ratios.is_empty() && ratios.iter().all(|ratio| ratio.is_finite())).then(|| median(&ratios))
}

/// Returns the median; 0 for no values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_figure_that_a_run_did_not_measure_is_unknown() {
        let rows = [
            json!({"mover": "a", "seconds": 4.0, "ms": 1.0}),
            json!({"mover": "b", "seconds": null}),
            json!({"mover": "a", "seconds": 2.0}),
        ];
        let runs = Runs(rows.iter().collect());
        assert_eq!(runs.median("seconds"), None);
        assert_eq!(runs.median("ms"), Some(1.0));
        let a = runs.only("mover", "a");
        assert_eq!(a.median("seconds"), Some(3.0));
        assert_eq!(
            (a.least("seconds"), a.most("seconds")),
            (Some(2.0), Some(4.0))
        );
        assert_eq!(a.middle("seconds").unwrap()["seconds"], 2.0);
        assert_eq!(runs.groups(&["mover"]).len(), 2);
        assert_eq!(ratio(&a, &a, "seconds"), Some(1.0));
        assert_eq!(ratio(&a, &runs.only("mover", "c"), "seconds"), None);
    }
}
