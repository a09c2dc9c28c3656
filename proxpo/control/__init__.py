"""Control: policies of Gymnasium environments, trained by recipes and by learners of their own."""
