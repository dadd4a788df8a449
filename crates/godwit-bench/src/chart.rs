//! Charts as SVG: lines over time or over a setting.

use std::io;
use std::ops::Range;
use std::path::Path;

use plotters::coord::ranged1d::ValueFormatter;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

const SIZE: (u32, u32) = (900, 480);
/// Colours that are distinct for colour-blind readers, too.
const COLORS: [RGBColor; 5] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(120, 120, 120),
    RGBColor(204, 121, 167),
];

/// A named line.
#[derive(Clone, Debug)]
pub struct Line {
    /// Name in the legend.
    pub name: String,
    /// Points from left to right.
    pub points: Vec<(f64, f64)>,
}

/// A chart of lines.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Title above the chart.
    pub title: String,
    /// Label below the horizontal axis.
    pub x_label: String,
    /// Label beside the vertical axis.
    pub y_label: String,
    /// True if the vertical axis is logarithmic.
    pub logarithmic: bool,
    /// Lines of the chart.
    pub lines: Vec<Line>,
    /// Shaded ranges of the horizontal axis.
    pub shaded: Vec<Range<f64>>,
    /// Horizontal level line, with its name.
    pub level: Option<(f64, String)>,
}

impl Chart {
    /// Writes the chart as SVG.
    ///
    /// # Errors
    /// I/O errors of the file, or a chart without points.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let root = SVGBackend::new(path, SIZE).into_drawing_area();
        let (x, y) = self.bounds()?;
        let mut builder = ChartBuilder::on(&root);
        builder
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60);
        let drawn = root.fill(&WHITE).and_then(|()| {
            if self.logarithmic {
                let mut chart = builder.build_cartesian_2d(x, y.clone().log_scale())?;
                self.draw(&mut chart, &y)
            } else {
                let mut chart = builder.build_cartesian_2d(x, y.clone())?;
                self.draw(&mut chart, &y)
            }?;
            root.present()
        });
        drawn.map_err(|error| io::Error::other(format!("cannot draw {}: {error}", path.display())))
    }

    fn bounds(&self) -> io::Result<(Range<f64>, Range<f64>)> {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let span = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::MAX, f64::MIN), |(low, high), value| {
                (low.min(value), high.max(value))
            })
        };
        if points().next().is_none() {
            return Err(io::Error::other(format!(
                "'{}' has nothing to draw",
                self.title
            )));
        }
        let (left, right) = span(&mut points().map(|point| point.0));
        let level = self.level.iter().map(|(level, _)| *level);
        let (low, high) = span(&mut points().map(|point| point.1).chain(level));
        let bottom = if self.logarithmic {
            low.max(1e-3) / 1.5
        } else {
            0.0
        };
        Ok((
            left..right.max(left + 1e-9),
            bottom..(high * 1.2).max(bottom + 1e-3),
        ))
    }

    fn draw<'a, 'b: 'a, Y>(
        &self,
        chart: &mut ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, Y>>,
        y: &Range<f64>,
    ) -> Result<(), DrawingAreaErrorKind<io::Error>>
    where
        Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        chart.draw_series(self.shaded.iter().map(|span| {
            Rectangle::new(
                [(span.start, y.start), (span.end, y.end)],
                BLACK.mix(0.08).filled(),
            )
        }))?;
        chart
            .configure_mesh()
            .x_desc(&self.x_label)
            .y_desc(&self.y_label)
            .light_line_style(TRANSPARENT)
            .draw()?;
        if let Some((level, name)) = &self.level {
            let across = [chart.x_range().start, chart.x_range().end].map(|x| (x, *level));
            chart
                .draw_series(LineSeries::new(across, BLACK.stroke_width(1)))?
                .label(name)
                .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLACK));
        }
        for (line, color) in self.lines.iter().zip(COLORS.iter().cycle()) {
            let style = color.stroke_width(2);
            chart
                .draw_series(LineSeries::new(line.points.iter().copied(), style).point_size(2))?
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(logarithmic: bool, points: Vec<(f64, f64)>) -> Chart {
        Chart {
            title: "waiting".to_owned(),
            x_label: "s".to_owned(),
            y_label: "ms".to_owned(),
            logarithmic,
            lines: vec![Line {
                name: "guest".to_owned(),
                points,
            }],
            shaded: vec![1.0..2.0],
            level: Some((5.0, "promise".to_owned())),
        }
    }

    #[test]
    fn what_is_drawn_is_in_the_file() {
        let dir = tempfile::tempdir().unwrap();
        for logarithmic in [false, true] {
            let path = dir.path().join(format!("{logarithmic}.svg"));
            let points = vec![(0.0, 1.0), (1.0, 80.0), (3.0, 2.0)];
            chart(logarithmic, points).write(&path).unwrap();
            let text = std::fs::read_to_string(path).unwrap();
            for word in ["waiting", "guest", "promise", "<polyline"] {
                assert!(text.contains(word), "{word}");
            }
        }
    }

    #[test]
    fn nothing_is_no_chart() {
        let dir = tempfile::tempdir().unwrap();
        let error = chart(true, Vec::new()).write(&dir.path().join("x.svg"));
        assert!(error.unwrap_err().to_string().contains("nothing to draw"));
    }
}
