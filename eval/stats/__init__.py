"""Statistics of the reports: intervals over groups, paired figures, sample sizes, serving."""
